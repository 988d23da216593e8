"""Requests of both sides on their streams, and the answers to them (MOQT §9)."""
