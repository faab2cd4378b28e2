"""Plans, draft trees and exits."""
