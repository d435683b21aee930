"""The artifact store: objects by content, records by key, leases, retention, export."""
