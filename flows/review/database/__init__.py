"""The page's database: tables and connections."""
