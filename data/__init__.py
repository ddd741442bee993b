"""Text on its way into the model: documents, tokens, files of tokens, windows of them."""
