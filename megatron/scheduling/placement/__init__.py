"""Place ranks on nodes and stages on ranks where Megatron has another order."""
