"""What `fuzz_readers` is made of: what damages an input, and for each kind of file what is sound and who judges."""
