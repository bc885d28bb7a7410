"""What the core does to one row, done to thousands through views of their columns."""
