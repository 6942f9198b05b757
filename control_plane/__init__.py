"""Decides: admission, scheduling, KV accounting and the public API. Never imports torch."""
