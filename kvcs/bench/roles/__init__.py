"""What the processes of the bench do; each module imports what its roles need."""
