"""What everything else stands on: errors, settings, files, processes, hashes."""
