"""Control plane (`channel`, `messages`) and data plane (`world`, `exchange`) between ranks."""
