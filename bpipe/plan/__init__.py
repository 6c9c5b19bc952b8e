"""What a configuration would cost, which configurations there are, and whether balancing helps."""
