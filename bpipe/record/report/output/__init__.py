"""What a report is printed as: a table, JSON, a page, a trace. Draws and words only what `bpipe.record.report` has judged."""
