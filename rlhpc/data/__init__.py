"""Prompts (`prompts`), batches of rows (`batch`) and micro-batch packing (`packing`)."""
