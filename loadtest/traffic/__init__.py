"""What is sent: sessions of customers, made from a seed; who sends it. HTTP only, to any OpenAI-compatible server."""
