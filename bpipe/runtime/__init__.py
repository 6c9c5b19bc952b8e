"""Run a rank's program on real tensors: capture, slots, streams and the engine that drives a transport."""
