"""What drafters and engine share; knows no method and no trainer."""
