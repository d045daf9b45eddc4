"""What can be chosen, as types: one module a command, the schemas they share, and the sentences for mistakes."""
