"""Run a rank's program on real tensors: capture, host buffers, streams and the engine that drives a transport."""
