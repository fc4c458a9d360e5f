"""Long contexts: attention within the documents of packed sequences."""
