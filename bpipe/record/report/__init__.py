"""What a run recorded, laid beside what its schedule predicts: read, replay, compare, explain.

`out` prints what is found.
"""
