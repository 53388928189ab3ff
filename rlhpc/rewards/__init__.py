"""Rule-based rewards by dotted path and the engine that runs them."""
