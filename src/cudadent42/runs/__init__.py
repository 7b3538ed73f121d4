"""What is kept of a run: its folder, the source that ran, and the starts of machines that it cost."""
