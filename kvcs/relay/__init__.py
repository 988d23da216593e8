"""The relay: routes and caches Tracks between sessions, and never opens a payload."""
