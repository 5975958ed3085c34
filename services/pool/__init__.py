"""Who is alive: the registry in Redis, and Ray actors that host the workers."""
