"""What this endpoint receives of Tracks: whose stream it is, what it may carry (MOQT §11)."""
