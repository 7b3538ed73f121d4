"""What machines and people cost (`rates`), and whether to keep a machine or stop it (`advise`)."""

from cudadent42.cost.advice import advise as advise
