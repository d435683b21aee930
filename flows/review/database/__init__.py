"""The page's database: tables, connections and migrations."""
