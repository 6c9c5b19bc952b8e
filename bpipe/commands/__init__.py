"""Sub-commands of `bpipe`, one file each, loaded only when they are called: `add_arguments(parser)` and
`run(options)`."""
