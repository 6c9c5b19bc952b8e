"""What the parts of a model take: one module for each kind of layer, bytes and seconds together."""
