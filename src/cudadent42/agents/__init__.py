"""An agent's way in: the lab as a server of the Model Context Protocol, over standard input and output.

The server measures nothing itself and never imports torch. Work runs in a process of the lab each, one at a time on a
device, within limits of minutes and money.
"""
