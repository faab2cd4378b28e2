"""The commands of `selfspec` and the parts they share. Nothing here imports torch before arguments are parsed."""
