"""What more than one process needs: rooms with one owner each, and five flat modules. Imports neither service."""
