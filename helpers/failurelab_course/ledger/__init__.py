"""What runs measured, kept in ledgers under evidence/, and the tables and pictures made from them."""
