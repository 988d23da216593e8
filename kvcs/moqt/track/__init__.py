"""A Track's Objects at rest: an origin publishes from them, a relay caches in them (MOQT §2)."""
