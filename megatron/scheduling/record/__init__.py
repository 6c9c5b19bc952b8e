"""Tell the log, Megatron's writers and the report's folder what a run did."""
