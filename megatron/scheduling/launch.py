import contextlib
def add_arguments(parser):
    return parser
def scheduling(args):
    return contextlib.nullcontext()
