"""Two runs of one training side by side: `read` what they left, `judge` whether they computed the same, `show` it as
text or JSON."""
