"""Sub-commands of `bpipe`, one module each, with `COMMAND` and `run(options)`, imported when they are called."""
