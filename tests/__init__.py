"""A package, so that none of that name which a wheel brings along can stand in its place."""
