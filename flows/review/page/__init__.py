"""The page itself: requests, their guard, and how texts are shown."""
