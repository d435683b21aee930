"""The page: its requests, their protection, and how texts are shown."""
