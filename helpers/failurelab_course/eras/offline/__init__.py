"""Where there is no network: wheels to carry, and environments made from them."""
