"""Images of requests: from data URLs and allowed hosts to spans in a prompt."""
