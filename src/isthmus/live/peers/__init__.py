"""Sessions between processes, what they say to each other, and KV on its way as frames."""
