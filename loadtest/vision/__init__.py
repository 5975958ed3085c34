"""Images: the tower alone, embeddings between processes, and first tokens with them."""
