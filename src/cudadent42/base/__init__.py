"""What any program needs: errors, serialisation, TOML tables, atomic writes, folders, git, seeds, progress."""
