"""The layers of the vocabulary in shards: which rows a shard holds, and what it computes of them."""
