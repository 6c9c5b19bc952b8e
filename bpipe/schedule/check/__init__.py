"""Judge a schedule before anything runs: the rules it must keep, and whether its ranks could wait for each other for
ever."""
