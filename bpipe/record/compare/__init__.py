"""Two runs of one training: `read` what they left, `judge` whether they computed the same, `show` it as text or JSON."""
