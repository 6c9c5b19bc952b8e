"""What a run recorded, laid beside what its schedule predicts: read, replay, compare; then a table, JSON, a page or a trace."""
