"""What a method will cost, before anything is trained."""
