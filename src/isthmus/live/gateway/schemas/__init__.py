"""What a JSON schema asks for, and the grammar of the JSON that fits it. Knows nothing of requests."""
