"""What this endpoint sends of Tracks: which Object goes next, and its octets (MOQT §3, §5, §11)."""
