"""Hold every flag once: `schedules`, `configurations`, `trainer` and `megatron` are the table, `commands` says which
command has which.

From it come the parsers of commands and trainer (`parser`), the reader of launches and the writer of flags
(`launches`), and the reference page (`page`). A new flag is one row.
"""
